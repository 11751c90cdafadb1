"""Publishing from an application, in the caller's transaction."""
