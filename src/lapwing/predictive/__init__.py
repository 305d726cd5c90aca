"""Predictions."""

from lapwing.predictive.functions import FunctionSamples, function_samples
from lapwing.predictive.prediction import Prediction
from lapwing.predictive.pushforward import predict

__all__ = ["FunctionSamples", "Prediction", "function_samples", "predict"]
