"""From rows to what people read: tables, pictures, a machine's page, the tables in docs.

In: the journals in a folder, judged, and the studies, which say what is shown. Out: Markdown, HTML
and pictures.
"""
