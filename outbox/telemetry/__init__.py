"""What the relay tells of itself: metrics, and one trace for each event.

    relay ──▶ meters ──▶ a snapshot ──▶ Prometheus, on the health listener
      │                        └──────▶ OTLP, pushed
      └─────▶ tracing ────────────────▶ OTLP, pushed

The relay counts in `meters`, plain numbers that cost it next to nothing; an SDK's
instruments would cost a delivery a tenth of its time.  `catalogue` is the table of
everything that is measured, and OpenTelemetry's variables (OTEL_*) say where it goes.
"""
