"""The pages, a module a subject: coroutines `(Context) -> Answer`, named by `console.table`."""
