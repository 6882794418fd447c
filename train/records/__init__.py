"""What a run writes down: metrics, progress, and the services that show them."""
