"""What the measuring tools share: plans, the runner, records, statistics, tables and pictures."""
