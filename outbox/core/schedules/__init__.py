"""Cron expressions and schedules."""
