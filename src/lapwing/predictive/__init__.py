"""Predictions."""

from lapwing.predictive.functions import FunctionSamples, function_samples
from lapwing.predictive.predicting import predict
from lapwing.predictive.prediction import Prediction

__all__ = ["FunctionSamples", "Prediction", "function_samples", "predict"]
