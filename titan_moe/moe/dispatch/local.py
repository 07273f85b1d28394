"""Every expert is on this rank: nothing travels."""

from torch import Tensor

from titan_moe.kernels.route_map import route_map
from titan_moe.moe.dispatch.base import Dispatched, Dispatcher
from titan_moe.moe.routing import Routing


class LocalDispatcher(Dispatcher):
    """Orders rows by expert. Gathering and summing them is left to the experts' products."""

    host_syncs = 0

    def dispatch_preprocess(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        sequences = routing.num_sequences
        map_ = route_map(routing.expert_ids_TK, routing.counts, routing.max_rows, num_sequences=sequences)
        return Dispatched(x_TD, routing.weights_TK, None, map_)

    def token_dispatch(self, dispatched: Dispatched) -> Dispatched:
        return dispatched

    def dispatch_postprocess(self, dispatched: Dispatched) -> Dispatched:
        return dispatched

    def combine_preprocess(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        return y

    def token_combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        return y

    def combine_postprocess(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        return y
