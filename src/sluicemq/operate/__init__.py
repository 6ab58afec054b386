"""Tools for operators: doctor, the MCP server, and the export of traces as spans."""
