"""Endpoints of other senders, as endpoints of outbox.

    document      the file: a record for each endpoint, with what the other sender's API says of it
    translation   what becomes of a record, and what could not be carried over
    svix, convoy, outpost, table
                  the translators, one for each source
    importing     translates all records, and adds the endpoints

A receiver that checks the other sender's signatures must notice nothing.  So the body is the
payload alone, the second signature is the other sender's with the secret that the customer has,
and refusals are retried.  What would make an endpoint get more events than before is never left
out: such an endpoint is not added, and the report says why.
"""
