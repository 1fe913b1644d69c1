"""From rows to what people read: tables, pictures, a machine's page, the tables in docs."""
