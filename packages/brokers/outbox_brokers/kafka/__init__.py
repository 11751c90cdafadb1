"""Delivery to a topic of Kafka: a lane is one partition."""
