"""One lane's deliveries: order, retry state, circuit breaker."""
