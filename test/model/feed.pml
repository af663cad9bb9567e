/* Who feeds an attempt in the trainer's place, for spin: a trainer, two receivers, a coordinator, several attempts at one version.
 *
 * What may happen: bytes go wrong on their way into a receiver; what a node tells (what its sender sends, that it has staged and what that is)
 * comes in any order, late, or never; an attempt is called off at any moment; the trainer's weights are written over once they are released, and
 * it is gone at any moment; the coordinator dies at any moment and knows nothing but what nodes say then.
 *
 * What must hold:
 *   F1  what is committed is what the trainer had, in every receiver's memory
 *   F2  nothing is read that was written over
 *
 * Rules that they rest on; -DMUTANT=n leaves one out (check-model):
 *   1 only who is proven feeds   2 proven is who has staged once all who send have told   3 what a node says after a restart proves nothing
 *   4 without an attempt a version is committed only where all are proven   5 who is found to differ holds nothing
 *   6 what is held from before is proven once it has staged again   7 sources that were released are not read again */
#ifndef MUTANT
#define MUTANT 0
#endif
#ifndef ATTEMPTS
#define ATTEMPTS 3
#endif
#ifndef DEATHS
#define DEATHS 1 /* of the coordinator */
#endif
#define N 2

#define NOTHING 0
#define RIGHT   1
#define WRONG   2
#define TRAINER 2 /* who sends: a receiver's number, or this */

mtype = { IDLE, MOVING, QUIETING, COMMITTED };

/* What is really there. */
byte memory[N];
bool overwritten, gone; /* the trainer's */

/* The attempt in flight, at the nodes. */
byte sender, sent; /* what the sender's fingerprints say */
bool in_flight, told, landed[N], staged[N];

/* What the coordinator believes. */
mtype phase = IDLE;
byte attempts, deaths;
bool held[N], proven[N], knows[N], known, released, failed;

inline prove()
{
    if
    :: known || MUTANT == 2 ->
        if
        :: (knows[0] || MUTANT == 6) && held[0] -> proven[0] = true
        :: else -> skip
        fi;
        if
        :: (knows[1] || MUTANT == 6) && held[1] -> proven[1] = true
        :: else -> skip
        fi
    :: else -> skip
    fi
}

/* Differs from what was sent: it holds nothing, and the attempt has failed. */
inline compare(m)
{
    if
    :: known && knows[m] && memory[m] != sent && m != sender ->
        failed = true;
        if
        :: MUTANT != 5 -> held[m] = false; proven[m] = false
        :: else -> skip
        fi
    :: else -> skip
    fi
}

inline begin(who)
{
    attempts++;
    sender = who;
    in_flight = true; told = false; known = false; failed = false;
    landed[0] = false; landed[1] = false; staged[0] = false; staged[1] = false;
    knows[0] = false; knows[1] = false;
    if
    :: who == TRAINER -> assert(!overwritten && !gone); /* F2 */ sent = RIGHT
    :: else -> sent = memory[who]; landed[who] = true
    fi;
    /* Who holds it already is not written to; START makes nothing of what all others hold. */
    if
    :: held[0] -> landed[0] = true
    :: else -> memory[0] = NOTHING; proven[0] = false
    fi;
    if
    :: held[1] -> landed[1] = true
    :: else -> memory[1] = NOTHING; proven[1] = false
    fi;
    phase = MOVING
}

/* STAGED of a node, with what it has fingerprinted. */
inline hears(m)
{
    staged[m] = false; /* once */
    knows[m] = true; held[m] = true;
    compare(m);
    prove()
}

inline commit()
{
    phase = COMMITTED;
    assert(memory[0] == RIGHT && memory[1] == RIGHT) /* F1 */
}

active proctype world()
{
end:
    do
    /* --- nodes --- */
    :: atomic { in_flight && !told && (phase == MOVING || phase == QUIETING) -> told = true;
        /* it comes, or is lost with what ends the attempt */
        known = true; compare(0); compare(1);
        if
        :: !failed -> prove()
        :: else -> skip
        fi }
    :: atomic { in_flight && !landed[0] && phase == MOVING && !(sender == TRAINER && (gone || overwritten)) -> landed[0] = true; memory[0] = sent }
    :: atomic { in_flight && !landed[0] && phase == MOVING && !(sender == TRAINER && (gone || overwritten)) -> landed[0] = true; memory[0] = WRONG }
    :: atomic { in_flight && !landed[1] && phase == MOVING && !(sender == TRAINER && (gone || overwritten)) -> landed[1] = true; memory[1] = sent }
    :: atomic { in_flight && !landed[1] && phase == MOVING && !(sender == TRAINER && (gone || overwritten)) -> landed[1] = true; memory[1] = WRONG }
    :: atomic { in_flight && landed[0] && !staged[0] && !knows[0] && phase == MOVING -> staged[0] = true }
    :: atomic { in_flight && landed[1] && !staged[1] && !knows[1] && phase == MOVING -> staged[1] = true }
    :: atomic { staged[0] && (phase == MOVING || phase == QUIETING) -> hears(0) }
    :: atomic { staged[1] && (phase == MOVING || phase == QUIETING) -> hears(1) }
    /* --- the trainer --- */
    :: atomic { !gone -> gone = true }
    :: atomic { released && !overwritten -> overwritten = true }
    /* --- the coordinator --- */
    :: atomic { phase == MOVING && sender == TRAINER && known && landed[0] && landed[1] && !released -> released = true } /* read */
    :: atomic { phase == MOVING && !failed && known && knows[0] && knows[1] -> in_flight = false; commit() }
    :: atomic { phase == MOVING -> phase = QUIETING }
    :: atomic { phase == QUIETING -> in_flight = false; staged[0] = false; staged[1] = false; phase = IDLE } /* quiet; what was on its way is lost */
    :: atomic { phase == IDLE && attempts < ATTEMPTS && !gone && (MUTANT == 7 || !released) -> begin(TRAINER) }
    :: atomic { phase == IDLE && attempts < ATTEMPTS && held[0] && (proven[0] || MUTANT == 1) && !(held[1] && proven[1]) -> begin(0) }
    :: atomic { phase == IDLE && attempts < ATTEMPTS && held[1] && (proven[1] || MUTANT == 1) && !(held[0] && proven[0]) -> begin(1) }
    :: atomic { phase == IDLE && held[0] && held[1] && ((proven[0] && proven[1]) || (MUTANT == 4 && (proven[0] || proven[1]))) -> commit() }
    /* It dies; nodes let go, and say what they have got whole. */
    :: atomic { deaths < DEATHS && phase != COMMITTED ->
        deaths++;
        in_flight = false; staged[0] = false; staged[1] = false; knows[0] = false; knows[1] = false; known = false; failed = false;
        held[0] = landed[0] && memory[0] != NOTHING; held[1] = landed[1] && memory[1] != NOTHING;
        proven[0] = held[0] && MUTANT == 3; proven[1] = held[1] && MUTANT == 3;
        phase = IDLE }
#ifdef REACH
    :: phase == COMMITTED && deaths == DEATHS && sender != TRAINER -> assert(false) /* reached: fed by a receiver, after a restart */
#endif
    od
}
