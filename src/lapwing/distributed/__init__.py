"""Data spread over the processes of a torch.distributed group: sums over data are sums over ranks.

    Σ_n  =  Σ_r Σ_(n in shard r)

`Shard(batches, ranks)` is data like any other; whoever reads data asks `data.ranks_of` for the ranks that share them.
What ranks compute from sums over ranks is the same on all, since the sums are, bit by bit; where it could differ all
the same (eigenvectors, right-hand sides) it is compared.
"""

from lapwing.distributed.ranks import ALONE, Ranks, Shard

__all__ = ["ALONE", "Ranks", "Shard"]
