"""Admission control: which requests start now and which wait."""
