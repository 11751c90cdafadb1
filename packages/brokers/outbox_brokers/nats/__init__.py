"""NATS JetStream: a lane is a subject of a stream."""
