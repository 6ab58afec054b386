"""An order service on SluiceMQ: the program of docs/tutorial.

    desk        changes orders in the database, and sends an event for each change
    review      prints large orders, for a person to look at
    books       writes each payment into the books, once
    reminders   reminds customers who have not paid, and cancels their orders after two hours
    history     records the events of each order in their order
    parcels     hands paid orders to the carrier, and tries again if it is away

They share a database (`tables`) and the events in one topic (`events`). `staff` starts all of them.
"""
