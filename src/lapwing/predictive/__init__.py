"""Predictions."""

from lapwing.predictive.prediction import Prediction
from lapwing.predictive.pushforward import predict

__all__ = ["Prediction", "predict"]
