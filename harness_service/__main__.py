"""``python -m harness_service``, also installed as ``harness-service``."""

from __future__ import annotations

from harness_service.cli.app import app


def main() -> None:
    app(prog_name="harness-service")


if __name__ == "__main__":
    main()
