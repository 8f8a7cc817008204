"""`ubatch bench abuse`: a server under attack, during a steady load.

streams     fifty streams run all the time; none may get a wrong token
attacks     one after the other, each with the statuses that the server may answer
rounds      a thousand streams at once, a third of them dropped midway, repeated: nothing may leak, memory may not grow
hang        one rank is stopped: `/health` must report it, requests must fail with its name, the server must end
"""
