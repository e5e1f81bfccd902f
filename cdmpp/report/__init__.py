"""HTML reports on one page: where a trained predictor errs, or how long the operators of a serving step take."""

from cdmpp.report.html import report_html, write_report, write_serving

__all__ = ["report_html", "write_report", "write_serving"]
