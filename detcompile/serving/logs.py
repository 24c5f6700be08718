"""Log messages of the front end on standard error, as text or as JSON lines."""

import json
import logging
import sys


class JSONLines(logging.Formatter):
    """Format a record as one JSON object with time, level, logger and message, and a traceback if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        entry = {"time": round(record.created, 3), "level": record.levelname.lower(), "logger": record.name}
        entry["message"] = record.getMessage()
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def write_logs(*, as_json: bool) -> None:
    """Write log messages to standard error: this package's from INFO on, others from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines() if as_json else logging.Formatter("%(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger("detcompile.serving").setLevel(logging.INFO)
