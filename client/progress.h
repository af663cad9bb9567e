/* How far a transfer is: share, rate and time left, from what has landed so far.
 *
 * Pure: the caller brings the time. The rate is that of the newest two seconds or so, so that it
 * follows a link that slows down, and an attempt that starts over starts it over. */
#ifndef RS_CLIENT_PROGRESS_H
#define RS_CLIENT_PROGRESS_H

#include <stddef.h>
#include <stdint.h>

enum { PROGRESS_POINTS = 32, PROGRESS_WINDOW_MS = 2000 };

struct progress {
    struct progress_point {
        uint64_t at_ns, landed;
    } points[PROGRESS_POINTS]; /* ring, ascending */
    unsigned first, n;
    uint64_t total;
};

/* Zeroed is a fresh one. at_ns may not fall; landed may: then all before is forgotten. */
void progress_add(struct progress *p, uint64_t at_ns, uint64_t landed, uint64_t total);
/* 0 … 1; 0 where the total is not known. */
double progress_share(const struct progress *p);
/* Bytes per second; 0 where nothing can be said yet. */
double progress_rate(const struct progress *p);
/* Seconds left at that rate; negative where nothing can be said. */
double progress_eta_s(const struct progress *p);
/* "[#####.....]" of `width` characters between the brackets; ret_text has width + 3 bytes. */
char *progress_bar(double share, unsigned width, char *ret_text);

#endif
