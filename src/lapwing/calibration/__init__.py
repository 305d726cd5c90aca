"""How sure predictions may be, found by the training data alone."""

from lapwing.calibration.classes import Choice
from lapwing.calibration.held_out import chosen_by
from lapwing.calibration.record import Calibration, calibrate, pack, unpack, with_process

__all__ = ["Calibration", "Choice", "calibrate", "chosen_by", "pack", "unpack", "with_process"]
