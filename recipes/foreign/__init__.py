"""Other trainers' configurations, and the recipes that say the same."""
