"""An order service on SluiceMQ: the program of docs/tutorial.

    desk        takes orders, payments and cancellations; tells everybody about them
    review      looks at large orders before they leave
    books       writes payments down, each of them once
    reminders   writes to customers who have not paid, and gives up after two hours
    history     what a customer sees of an order, step by step
    parcels     hands paid orders to the carrier, again and again if need be

They share a database (`tables`) and the events in one topic (`events`); `staff` puts them to work.
"""
