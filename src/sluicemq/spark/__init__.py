"""The Spark data source and sink: the broker is a DataFrame."""
