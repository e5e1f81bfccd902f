"""Where a trained predictor errs, as one HTML page."""

from cdmpp.report.html import report_html, write_report

__all__ = ["report_html", "write_report"]
