"""Shared by all tests. That this file is here puts `tests/` on the path: `import ref` works."""
