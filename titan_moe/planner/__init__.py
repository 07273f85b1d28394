"""The planner: will a run fit, how fast will it be, which layout is best, before a GPU is booked. Needs no torch.

``formulas`` in ``docs/planner.md``; the modules named in ``to_js.MODULES`` are also the page's.
"""
