/* One lower-case line per fact, on stderr: time, level, text. Values stand after their noun.
 *
 * Floors below service and peer return errors; they log at debug only. Thread: any. */
#ifndef RS_BASE_LOG_H
#define RS_BASE_LOG_H

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };

/* Lines above `level` are dropped. Default LOG_INFO. `process` (static text) names the process in
 * each line, "reshardd" or "data plane". */
void log_init(enum log_level level, const char *process);
/* 0 and the level, or RS_EINVAL. */
int log_level_parse(const char *text, enum log_level *ret_level);
const char *log_level_name(enum log_level level);
void log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define log_error(...) log_line(LOG_ERROR, __VA_ARGS__)
#define log_warn(...)  log_line(LOG_WARN, __VA_ARGS__)
#define log_info(...)  log_line(LOG_INFO, __VA_ARGS__)
#define log_debug(...) log_line(LOG_DEBUG, __VA_ARGS__)

#endif
