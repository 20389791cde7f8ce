"""Settings of a gateway whose engines get nothing but what a test sends."""

from deploy.gateway.scheduling.config import CalibrationSection, SchedulingConfig

NOT_TIMED = CalibrationSection(mode="off")
"""No prompts of the gateway's own."""
UNTIMED = SchedulingConfig(calibration=NOT_TIMED)
