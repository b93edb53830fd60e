"""One question to one client."""


def ask_one(contact, client, question):
    """The answer of one client, which has to give one."""
    ((answered, answer),) = contact.ask({client: question})
    assert answered == client
    return answer
