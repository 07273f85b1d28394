"""Any layout of a plain ``nn.Module``: meshes, plans, and the styles that plans name."""
