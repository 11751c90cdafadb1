"""Conformance tests for receivers in any language: `outbox conform`.

cases      requests and expected responses; sans-IO
vectors    the cases with fixed times, as JSON for test suites in other languages
grading    sends the cases to a receiver and checks the responses
"""
