"""Results as text: tables, JSON, Markdown, JUnit."""
