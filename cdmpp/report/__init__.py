"""Where a trained predictor errs, or what operators of a step take, as one HTML page."""

from cdmpp.report.html import report_html, write_report, write_serving

__all__ = ["report_html", "write_report", "write_serving"]
