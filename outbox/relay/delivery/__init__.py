"""The tasks that send deliveries and record their attempts."""
