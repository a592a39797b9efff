/* Extended sockets: see <sys/exs.h>. */
#ifndef EXS_H
#define EXS_H
#include <sys/exs.h>
#endif
