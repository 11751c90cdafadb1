"""Telemetry of the relay: metrics, and one trace for each event.

    relay ──▶ meters ──▶ a snapshot ──▶ Prometheus, on the health listener
      │                        └──────▶ OTLP, pushed
      └─────▶ tracing ────────────────▶ OTLP, pushed

The relay counts in `meters`, which are plain numbers; the SDK's instruments would take a tenth
of a delivery's time.  `catalogue` is the table of all metrics; `alerts.yml` (Prometheus) and
`dashboard.json` (Grafana) query them.  OpenTelemetry's variables (OTEL_*) configure the export.
"""
