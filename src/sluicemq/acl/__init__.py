"""Access control (ACL 1.0): who may do what. Pure: texts and requests in, verdicts out."""
