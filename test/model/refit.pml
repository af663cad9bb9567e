/* The core of a refit's protocol, for spin: a coordinator with a ledger, two members, one version, several attempts.
 *
 * What may happen: any message is late, lost or overtaken by one of another kind (never invented, never changed); a deadline passes or an operator
 * aborts at any moment; the coordinator or a member dies and comes back at any moment, where what the ledger was writing
 * is then durable or gone. Members' memory outlives them (it is the workers').
 *
 *   IDLE → RECORDING (attempt's number) → PREPARING → MOVING → COMMITTING (the record) → DONE
 *                                     deadline, death → ABORTING (until quiesced) → IDLE
 *
 * What must hold, as assertions where it could break:
 *   A1  a commit is only recorded when every member has staged and accepted that attempt, whole
 *   A2  nobody is told before the record is durable
 *   A3  no attempt begins while a member may still write for an older one
 *   A4  no byte of an older attempt lands, and none at all once the commit is recorded
 *   A5  what was told stays committed, and every member's memory stays that content
 *
 * Rules that they rest on; -DMUTANT=n leaves one out, and spin must find what breaks (check-model does it for each):
 *   1 tell after durable   2 wait for quiesce   3 fence: an attempt that was aborted here is never begun again
 *   4 incarnation: what was meant for a member before its death is refused   5 all accepts, not one
 *   6 after a restart the attempt before is aborted first   7 attempt numbers are durable before they are used
 *   8 a member of which nothing is heard counts as quiet only once its lease is over, when its data plane drops all by itself */
#ifndef MUTANT
#define MUTANT 0
#endif
#ifndef ATTEMPTS
#define ATTEMPTS 2
#endif
#ifndef DEATHS
#define DEATHS 1 /* of the coordinator */
#endif
#ifndef MEMBER_DEATHS
#define MEMBER_DEATHS 0 /* of each member */
#endif
#ifndef LINKS
#define LINKS 0 /* times that the link of member 1 is cut */
#endif
#define N 2
#define CUT(m) ((m) == 1 && !linked)

mtype = { PREPARE, START, ABORT, COMMITTED, HELLO, PREPARED, STAGED, QUIESCED };
mtype = { IDLE, RECORDING, PREPARING, MOVING, COMMITTING, ABORTING, DONE };
mtype = { NOTHING, ATTEMPT, COMMIT };

/* Type, attempt, incarnation of the member. */
#ifndef LATE
#define LATE 2 /* messages on their way to a member */
#endif
chan to[N] = [LATE] of { mtype, byte, byte };
/* Type, attempt, incarnation. */
chan from[N] = [1] of { mtype, byte, byte };

/* The ledger: what is durable, and what is being written. */
byte ledger_attempt, ledger_committed;
mtype writing_what = NOTHING;
byte writing_value;

/* Seen from above, for the assertions only. */
byte newest;       /* greatest attempt that was begun */
byte moves[N];     /* attempt for which a member may write; 0: none */
byte memory[N];    /* attempt whose bytes are there, whole */
byte accepted[N];  /* greatest attempt that the member has accepted */
byte told;         /* attempt that somebody was told to be committed */
bool linked = true, lease_over; /* of member 1 */
bool decided;      /* the commit has been recorded and has not been lost with a crash */

/* A full channel loses the message, as a network may. */
inline send(c, type, attempt, incarnation)
{
    if
    :: nfull(c) -> c ! type, attempt, incarnation
    :: full(c) -> skip
    fi
}

active proctype ledger()
{
end:
    do
    :: atomic { writing_what == ATTEMPT -> ledger_attempt = writing_value; writing_what = NOTHING }
    :: atomic { writing_what == COMMIT -> ledger_committed = writing_value; writing_what = NOTHING }
    od
}

proctype member(byte m)
{
    byte attempt = 0, fence = 0, incarnation = 1, deaths = 0, cuts = 0, x, n;
    bool prepared = false, staged = false;
    mtype type;
end:
    do
    :: atomic { nempty(to[m]) ->
        if /* whichever: they overtake each other */
        :: to[m] ?? PREPARE, x, n -> type = PREPARE
        :: to[m] ?? START, x, n -> type = START
        :: to[m] ?? ABORT, x, n -> type = ABORT
        :: to[m] ?? COMMITTED, x, n -> type = COMMITTED
        fi;
        if
        :: (n != incarnation && MUTANT != 4) || CUT(m) -> skip
        :: else ->
            if
            :: type == PREPARE && attempt == 0 && (x > fence || MUTANT == 3) ->
                attempt = x; prepared = true; staged = false;
                send(from[m], PREPARED, x, incarnation)
            :: type == START && attempt == x && prepared && !staged -> moves[m] = x
            :: type == ABORT ->
                if
                :: attempt != 0 && attempt <= x -> attempt = 0; prepared = false; staged = false; moves[m] = 0
                :: else -> skip
                fi;
                if
                :: x > fence -> fence = x
                :: else -> skip
                fi;
                send(from[m], QUIESCED, x, incarnation)
            :: type == COMMITTED -> assert(ledger_committed == x && memory[m] == x) /* A2, A5 */
            :: else -> skip
            fi
        fi;
        type = HELLO; x = 0; n = 0 }
    /* Bytes land: first some, then all. */
    :: atomic { moves[m] != 0 && memory[m] == moves[m] && !staged ->
        staged = true; accepted[m] = moves[m]; moves[m] = 0;
        send(from[m], STAGED, attempt, incarnation) }
    :: atomic { moves[m] != 0 && memory[m] != moves[m] ->
        assert(moves[m] == newest && !decided); /* A4 */
        memory[m] = moves[m] }
    /* Said again, should it have been lost. */
    :: atomic { staged && empty(from[m]) -> send(from[m], STAGED, attempt, incarnation) }
    :: atomic { empty(from[m]) -> send(from[m], HELLO, 0, incarnation) }
    /* A cut link: what is sent is lost. In the end its lease is over; then it joins again, as another session. */
    :: atomic { m == 1 && linked && cuts < LINKS -> cuts++; linked = false }
    :: atomic { CUT(m) && !lease_over ->
        lease_over = true;
        attempt = 0; prepared = false; staged = false; moves[m] = 0 }
    :: atomic { CUT(m) && lease_over -> linked = true; lease_over = false; incarnation++ }
    /* Death: nothing moves any more, nothing is remembered; it says hello as another. */
    :: atomic { deaths < MEMBER_DEATHS ->
        deaths++; incarnation++;
        attempt = 0; fence = 0; prepared = false; staged = false; moves[m] = 0 }
    od
}

#define ALL(v) ((v) == 3)
#define SEND_ALL(type, value)                                                                      \
    send(to[0], type, value, known[0]);                                                            \
    send(to[1], type, value, known[1])

proctype coordinator()
{
    mtype phase = IDLE, type;
    byte attempt = 0, answers = 0, deaths = 0, x, n, m;
    byte known[N]; /* incarnations that have said hello; 0: none */
end:
    do
    :: atomic { phase == IDLE && ledger_attempt < ATTEMPTS && known[0] != 0 && known[1] != 0 && writing_what == NOTHING ->
        attempt = ledger_attempt + 1;
        if
        :: MUTANT == 7 && attempt <= newest -> skip
        :: else -> writing_what = ATTEMPT; writing_value = attempt
        fi;
        phase = RECORDING }
    :: atomic { phase == RECORDING && (writing_what == NOTHING || MUTANT == 7) ->
        assert(moves[0] == 0 && moves[1] == 0); /* A3 */
        assert(attempt > newest);
        newest = attempt;
        answers = 0;
        SEND_ALL(PREPARE, attempt);
        phase = PREPARING }
    :: atomic { phase == PREPARING && empty(to[0]) -> send(to[0], PREPARE, attempt, known[0]) } /* said again */
    :: atomic { phase == PREPARING && ALL(answers) -> answers = 0; SEND_ALL(START, attempt); phase = MOVING }
    :: atomic { phase == MOVING && (ALL(answers) || (MUTANT == 5 && answers != 0)) ->
        assert(accepted[0] == attempt && accepted[1] == attempt); /* A1 */
        assert(memory[0] == attempt && memory[1] == attempt);
        writing_what = COMMIT; writing_value = attempt; decided = true;
        phase = COMMITTING }
    :: atomic { phase == COMMITTING && (writing_what == NOTHING || MUTANT == 1) ->
        assert(ledger_committed == attempt); /* A2 */
        told = attempt;
        SEND_ALL(COMMITTED, attempt);
        phase = DONE }
    /* A deadline, an operator. Not once the commit is being written: then it is not ours to end any more. */
    :: atomic { phase == PREPARING || phase == MOVING -> answers = 0; SEND_ALL(ABORT, attempt); phase = ABORTING }
    :: atomic { phase == ABORTING && empty(to[0]) && empty(to[1]) -> SEND_ALL(ABORT, attempt) }
    :: atomic { phase == ABORTING && (ALL(answers) || MUTANT == 2) -> answers = 0; phase = IDLE }
    :: atomic { phase == ABORTING && !linked && (lease_over || MUTANT == 8) -> answers = answers | 2 } /* expelled */
    :: atomic { from[0] ?? type, x, n -> m = 0; goto answer }
    :: atomic { from[1] ?? type, x, n -> m = 1; goto answer }
    /* Death: what was being written is durable or gone. */
    :: atomic { deaths < DEATHS ->
        deaths++;
        if
        :: writing_what == COMMIT -> ledger_committed = writing_value
        :: writing_what == COMMIT -> decided = false
        :: writing_what == ATTEMPT -> ledger_attempt = writing_value
        :: true -> skip
        fi;
        writing_what = NOTHING;
        decided = ledger_committed != 0;
        assert(told == 0 || ledger_committed == told); /* A5 */
        known[0] = 0; known[1] = 0; answers = 0;
        attempt = ledger_attempt;
        if
        :: ledger_committed != 0 -> phase = DONE; told = ledger_committed
        :: ledger_committed == 0 && attempt != 0 && MUTANT != 6 -> phase = ABORTING
        :: else -> phase = IDLE
        fi }
    od;
answer:
    atomic {
        if
        :: n < known[m] || CUT(m) -> skip /* of an incarnation that is dead */
        :: n > known[m] && !CUT(m) ->
            /* A new one: its predecessor is dead and moves nothing, which is as good as QUIESCED. */
            known[m] = n;
            if
            :: phase == PREPARING || phase == MOVING -> answers = 0; SEND_ALL(ABORT, attempt); phase = ABORTING
            :: phase == ABORTING -> send(to[m], ABORT, attempt, n)
            :: else -> skip
            fi
        :: n == known[m] && !CUT(m) ->
            if
            :: x == attempt && ((phase == PREPARING && type == PREPARED) || (phase == MOVING && type == STAGED) ||
                (phase == ABORTING && type == QUIESCED)) -> answers = answers | (1 << m)
            :: else -> skip
            fi
        fi;
        type = HELLO; x = 0; n = 0; m = 0;
        assert(told == 0 || (memory[0] == told && memory[1] == told)); /* A5 */
#ifdef REACH
        assert(told == 0) /* reached: the model is not empty */
#endif
    }
    goto end
}

init
{
    atomic { run coordinator(); run member(0); run member(1) }
}
