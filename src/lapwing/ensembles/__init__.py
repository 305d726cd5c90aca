"""Ensembles and friends: networks trained from several starts, snapshots of one run, dropout at prediction. Each gives
a fit that predicts, saves and compares as others do."""

from lapwing.ensembles.deep import deep
from lapwing.ensembles.dropout import Dropout, dropout
from lapwing.ensembles.swag import swag
from lapwing.ensembles.train import train

__all__ = ["Dropout", "deep", "dropout", "swag", "train"]
