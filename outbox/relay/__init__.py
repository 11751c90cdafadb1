"""The running relay: thin loops that carry decisions of the core to the IO."""
