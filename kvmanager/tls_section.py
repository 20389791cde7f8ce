"""The files for mutual TLS as a configuration file names them."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from transport import TlsFiles


class TlsSection(BaseModel):
    """PEM files for mutual TLS."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cert: Path
    key: Path
    ca: Path

    def files(self) -> TlsFiles:
        """As the transport and RPC layers take it."""
        return TlsFiles(cert=self.cert, key=self.key, ca=self.ca)
