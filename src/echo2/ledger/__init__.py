"""The durable record of groups, versions and steps."""
