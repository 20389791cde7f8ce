"""What tests of engine profiles share."""

from datetime import UTC, datetime

from deploy.profile_file import Provenance

provenance = Provenance(
    url="http://engine:8000", model="m", date=datetime(2026, 11, 21, tzinfo=UTC), repeats=5
)
