"""The text of a new rules file, with a comment for each rule."""

SAFE = """\
# Rules of this node for FedUP's questions. They bind every app and run that comes to this node.
# SuperNode: --node-config 'fedup-rules="/path/to/this/file"', or the variable FEDUP_NODE_RULES, or this file as
# ~/.fedup/node-rules.toml. One file for each node: beside it is a folder with the node's account and log.
# Rules bind questions and settings. Against an app with other code only Flower's trusted entities help.
format = 1

# Exact answers, under no guarantee. What may be asked:
#   "moments"    counts, sums and second moments of features, by class
#   "centroids"  means of few rows, or of one: close to the rows themselves
#   "eraser"     means, variances and second moments at early layers, for sample requests
#   "tallies"    counts of right answers under filters, and with biases added to scores, for verdicts and so that no
#                class is harmed. Very many of them show the scores of rows. Each request takes one to ten answers
#   "labels"     the class of each named row, and whether this node holds it: needed for sample requests
#   "delta"      a change of weights fitted to named rows, so that they look unseen: for withdrawals
#   "subjects"   which rows are a person's, asked by the person's tag: needed for requests that name persons
# For differential privacy alone: questions = []
questions = ["moments"]

# Fingerprints of models that may be asked about (fedup status shows them), or "any": then each is in the log. A server
# can choose weights that show more than usual: exact answers are given for so many different models at most, and so
# many in all. An operator who allows more raises the number.
bases = "any"
most_bases = 3
most_answers = 200

# Layers whose inputs may be summarised: "last" is the last linear layer. Early layers show the rows: the first one
# takes the rows themselves. Sample requests need the eraser's layers here, by name. "any" allows all.
cuts = ["last"]

# Every group of rows behind exact answers has so many rows at least. This holds for differences, too: a question is
# refused if it would single out fewer rows together with any answers before.
least_rows = 20

# Centroids for each row, where "centroids" is allowed.
most_ratio = 0.05

# Such a refusal itself shows something of the rows. After so many of them no exact question is answered any more, until
# you have looked at the log (answers.jsonl) and set "refusals" in record.json to 0.
most_refusals = 10

# No answer leaves earlier than so many seconds after its question, so that time shows nothing. Longer than any answer
# takes, and shorter than the server waits.
answer_after_s = 0.0

# Releases under differential privacy: ε and δ of one, and of all together as long as the account exists. Without this
# part they are refused. Exact answers are outside this guarantee.
# unit = "subject" allows only releases that protect all rows of a person together, where the app says whose rows are.
[privacy]
unit = "record"
most_epsilon = 2.0
most_delta = 1e-5
total_epsilon = 8.0
total_delta = 1e-5
"""

OPEN = """\
# For tests and demonstrations: this node answers every question. Each answer says so, and the server reports it.
format = 1
open = true
"""
