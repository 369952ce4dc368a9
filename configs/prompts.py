"""Prompts of our own for experiments with a real model."""

# Short instructions, about as long as Alpaca's (19.31 tokens on average, Figure 11 of the
# PagedAttention paper). Their lengths differ on purpose: sharing depends on where a prompt ends
# within its last block.
INSTRUCTIONS = (
    "Name three animals that live in the desert.",
    "Explain in two sentences why bread rises in the oven.",
    "Write a short poem about the first snow of the year.",
    "What is the difference between a lake and a lagoon?",
    "Suggest a title for a story about a lighthouse keeper who befriends a whale.",
    "List four things that a beginner should pack for a day of walking in the mountains.",
    "Turn this sentence into a question: The train to the coast leaves at noon.",
    "Describe the taste of a lemon to somebody who has never eaten one.",
    "Give one reason for and one reason against keeping a cat indoors.",
    "Translate 'good evening' into Italian.",
    "How many minutes are there in three and a half hours?",
    "Write a polite note to a neighbour whose radio is too loud late at night, and offer a"
    " solution that suits both of you.",
    "Which planet has the most moons?",
    "Summarise in one line: The bakery on the corner closed because the rent doubled, and the"
    " owner now sells cakes from a van.",
    "Invent a name for a shop that mends old umbrellas.",
    "Explain to a child of six what a shadow is.",
    "Find the odd one out and say why: violin, cello, trumpet, harp.",
    "Write two sentences that could open a mystery set in a greenhouse.",
    "What should I do first when a pan of oil catches fire?",
    "Give an example of a word that is spelled the same forwards and backwards.",
    "Rewrite in plain words: The committee endeavoured to ascertain the origin of the discrepancy.",
    "Propose a simple dinner that uses potatoes, eggs and spinach, and tell me in which order to"
    " cook them.",
    "Why do leaves change colour in autumn?",
    "Compare travelling by bus with travelling by bicycle in a small town.",
)
