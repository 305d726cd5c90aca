"""Training loops over the shell: prior and noise are learnt while the network is trained, or between trainings."""

from lapwing.training.history import EvidenceRecord, History
from lapwing.training.loss import TrainingLoss
from lapwing.training.online import OnlineEvidence
from lapwing.training.retraining import mackay
from lapwing.training.snapshot import Snapshot

__all__ = ["EvidenceRecord", "History", "OnlineEvidence", "Snapshot", "TrainingLoss", "mackay"]
