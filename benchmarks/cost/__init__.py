"""What each delivery costs: CPU time, WAL, disk, rows and fsyncs, beside the peers."""
