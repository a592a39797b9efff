/*
 * Extended sockets (EXS): asynchronous, zero-copy streams and messages over RDMA.
 *
 * Each call has a manual page; exs(7) is the overview, with the steps for porting a sockets program.
 *
 * Calls return -1 and set errno when they fail. An asynchronous call returns 0 when its operation is queued; the operation then
 * makes exactly one event in its event queue. Memory and structures that an asynchronous call is given belong to the library from
 * the call until that event has been dequeued. No call raises SIGPIPE.
 */
#ifndef SYS_EXS_H
#define SYS_EXS_H

#include <limits.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- versions, handles ------------------------------------------------------------------------------------------------- */

/* The interface that a program was written to. */
typedef int exs_version_t;
#define EXS_VERSION1 1
#define EXS_VERSION EXS_VERSION1

/* An event queue. */
typedef int exs_qhandle_t;
#define EXS_QHANDLE_INVALID (-1)

/* A registered region of memory. EXS_MHANDLE_UNREGISTERED stands where a handle could: memory without one. */
typedef int exs_mhandle_t;
#define EXS_MHANDLE_INVALID (-1)
#define EXS_MHANDLE_UNREGISTERED 0

/* A value of the program's own, which comes back with the event. */
typedef void *exs_ahandle_t;

/* ---- flags --------------------------------------------------------------------------------------------------------------- */

/* exs_mregister, exs_mmodify: the memory is shared with other processes (accepted: all memory is treated so). */
#define EXS_MRF_SHARED 0x1

/* Receives: small data may be left where it arrived; the event says where, exs_recycle_recv_buffer gives that place back. */
#define EXS_IN_PLACE 0x01000000

/* exs_cancel: which operations. Both: those that fit both. */
#define EXS_CAF_FILDES 0x1  /* those of this descriptor */
#define EXS_CAF_AHANDLE 0x2 /* those with this ahandle */

/* exs_shutdown: no more sends. */
#define EXS_SHUT_WR 1

/* exs_poll, and its events. */
#define EXS_POLLIN 0x01
#define EXS_POLLOUT 0x04
#define EXS_POLLERR 0x08
#define EXS_POLLHUP 0x10

/* ---- vectors --------------------------------------------------------------------------------------------------------------- */

/* A piece of memory. */
typedef struct exs_iovec {
    void *iov_base;            /* first byte */
    size_t iov_len;            /* bytes */
    exs_mhandle_t iov_mhandle; /* the region that it lies in, or EXS_MHANDLE_UNREGISTERED */
} exs_iovec_t;

/* A piece of a file. */
typedef struct exs_fdvec {
    int fdv_fd;       /* the file, open for reading; it may be closed once the operation is queued */
    off_t fdv_offset; /* first byte */
    size_t fdv_len;   /* bytes; EXS_FDV_TO_END: to the end of the file */
} exs_fdvec_t;
#define EXS_FDV_TO_END SIZE_MAX

/* A message in several pieces. */
typedef struct exs_msghdr {
    void *msg_name;        /* receives: where the peer's address is put, or NULL; sends: NULL */
    socklen_t msg_namelen; /* room there, and then the length of the address */
    int msg_iovlen;        /* pieces; at most IOV_MAX */
    exs_iovec_t *msg_iov;  /* the pieces */
    int msg_flags;         /* receives: MSG_TRUNC when a message was longer */
} exs_msghdr_t;

/* A part of what exs_sendfile sends. */
typedef struct exs_xferfile {
    int xf_type; /* EXS_IOVEC or EXS_FDVEC */
    union {
        exs_iovec_t xf_iovec;
        exs_fdvec_t xf_fdvec;
    } xf_vec;
} exs_xferfile_t;
#define EXS_IOVEC 1
#define EXS_FDVEC 2

/* exs_accept: where the peer's address is put. */
typedef struct exs_acceptaddr {
    struct sockaddr *aa_addr; /* room for it, or NULL */
    socklen_t aa_addrlen;     /* bytes there; with the event, the length of the address, which may be more */
} exs_acceptaddr_t;

/* exs_poll: a socket, and what is asked of it. Each makes an event of its own. */
typedef struct exs_pollfd {
    int pfd_fd;       /* the socket */
    short pfd_events; /* EXS_POLLIN, EXS_POLLOUT */
} exs_pollfd_t;

/* ---- events ------------------------------------------------------------------------------------------------------------ */

#define EXS_EVT_POLL 1
#define EXS_EVT_CONNECT 2
#define EXS_EVT_ACCEPT 3
#define EXS_EVT_SEND 4
#define EXS_EVT_RECV 5
#define EXS_EVT_SENDMSG 6
#define EXS_EVT_RECVMSG 7
#define EXS_EVT_SENDFILE 8
#define EXS_EVT_SENDTIMEOUT 9  /* a send ran into SO_ASYNC_SEND_TIMEOUT; its data stands where that of the send would */
#define EXS_EVT_RECVTIMEOUT 10 /* a receive ran into SO_ASYNC_RECV_TIMEOUT */
#define EXS_EVT_SHUTDOWN 11
#define EXS_EVT_CLOSE 12

/* exs_evt_flags */
#define EXS_EVF_IN_PLACE 0x1 /* exs_evt_buffer is the library's, until exs_recycle_recv_buffer */
#define EXS_EVF_TRUNC 0x2    /* a message was longer than its receive: the rest is lost */

/* Of exs_accept. */
typedef struct exs_evt_accept {
    int exs_evt_new_socket;         /* the connection, or -1 */
    exs_acceptaddr_t *exs_evt_addr; /* as in the call */
} exs_evt_accept_t;

/* Of exs_poll. */
typedef struct exs_evt_poll {
    short exs_evt_events; /* EXS_POLL*: what the socket is ready for */
} exs_evt_poll_t;

/* Of exs_send and exs_recv. */
typedef struct exs_evt_xfer {
    void *exs_evt_buffer;          /* the data: as in the call, or left in place */
    size_t exs_evt_length;         /* bytes moved, also when exs_evt_errno is set */
    exs_mhandle_t exs_evt_mhandle; /* as in the call */
} exs_evt_xfer_t;

/* Of exs_sendmsg and exs_recvmsg. */
typedef struct exs_evt_xfermsg {
    exs_msghdr_t *exs_evt_msg; /* as in the call */
    size_t exs_evt_length;     /* bytes moved */
} exs_evt_xfermsg_t;

/* Of exs_sendfile. */
typedef struct exs_evt_xferfile {
    const exs_xferfile_t *exs_evt_vec; /* as in the call */
    int exs_evt_veclen;                /* as in the call */
    uint64_t exs_evt_length;           /* bytes moved */
} exs_evt_xferfile_t;

/* The end of one operation. */
typedef struct exs_event {
    int exs_evt_type;   /* EXS_EVT_*, which also says what of the union is meant */
    int exs_evt_errno;  /* 0, or why it failed */
    int exs_evt_socket; /* the descriptor of the call */
    int exs_evt_flags;  /* EXS_EVF_* */
    exs_ahandle_t exs_evt_ahandle;
    union {
        exs_evt_accept_t exs_evt_accept;
        exs_evt_poll_t exs_evt_poll;
        exs_evt_xfer_t exs_evt_xfer;
        exs_evt_xfermsg_t exs_evt_xfermsg;
        exs_evt_xferfile_t exs_evt_xferfile;
    } exs_evt_union;
} exs_event_t;

/* Most events of one exs_qdequeue. */
#define EXS_EVTVEC_MAX 4096

/* ---- event queues ---------------------------------------------------------------------------------------------------------- */

/* exs_qmodify and exs_qstatus: what of the queue. */
#define EXS_QATTR_DEPTH 1  /* int: operations and events that it has room for */
#define EXS_QATTR_SIGNAL 2 /* exs_signal_t: its descriptor, for poll(2) and epoll(7) */
#define EXS_QATTR_EVENTS 3 /* int: events in it; exs_qstatus only */
#define EXS_QATTR_WAIT 4   /* int: how exs_qdequeue waits */

/* EXS_QATTR_SIGNAL: whether the queue's descriptor becomes readable while there are events. */
typedef struct exs_signal {
    int sig_action; /* EXS_SIG_ENABLE or EXS_SIG_DISABLE */
    int sig_fd;     /* exs_qstatus: the descriptor; not to be read, written or closed */
} exs_signal_t;
#define EXS_SIG_DISABLE 0
#define EXS_SIG_ENABLE 1

/* EXS_QATTR_WAIT */
#define EXS_WAIT_ADAPTIVE 0  /* look for a while, then sleep */
#define EXS_WAIT_NOTIFY 1    /* sleep at once */
#define EXS_WAIT_BUSY_POLL 2 /* never sleep */

/* ---- options of sockets ---------------------------------------------------------------------------------------------------- */

/* exs_setsockopt, exs_getsockopt at SOL_SOCKET */
#define SO_ASYNC_RECV_ORDERED 0x4501 /* int: data completes receives in their order; always so */
#define SO_ASYNC_SEND_TIMEOUT 0x4502 /* struct timeval or exs_timeout_t: limit of sends; zero: none */
#define SO_ASYNC_RECV_TIMEOUT 0x4503 /* the same for receives */

/* A limit of time that may be for one operation only. */
typedef struct exs_timeout {
    struct timeval to_time; /* zero: none */
    int to_flags;           /* 0 or EXS_TIMEOUT_ONCE */
} exs_timeout_t;
#define EXS_TIMEOUT_ONCE 0x1 /* the first operation that runs into the limit ends it */

/* exs_fcntl. Each F_GET returns the value; each F_SET takes an int. They are for sockets before connect or listen. */
#define EXS_F_GETCREDITS 0x4501      /* announcements that the peer may have under way to us: 4 to 65535, all in 256 MiB */
#define EXS_F_SETCREDITS 0x4502
#define EXS_F_GETSMALLPACKET 0x4503  /* small_packet_max_size, bytes: 0 to 2^24 */
#define EXS_F_SETSMALLPACKET 0x4504
#define EXS_F_GETBUFFER 0x4505       /* intermediate buffer of a stream, bytes: 4096 to 2^30 */
#define EXS_F_SETBUFFER 0x4506
#define EXS_F_GETMODE 0x4507         /* how a stream moves its bytes: EXS_MODE_* */
#define EXS_F_SETMODE 0x4508
#define EXS_F_GETDESIGN 0x4509       /* how sequenced packets are moved: EXS_DESIGN_*; both sides need the same */
#define EXS_F_SETDESIGN 0x450a
#define EXS_F_GETCRC 0x450b          /* 1: a CRC on everything that travels over TCP */
#define EXS_F_SETCRC 0x450c
#define EXS_F_GETSTATS 0x450d        /* fills in an exs_stats_t, at any time; returns 0 */

#define EXS_MODE_DYNAMIC 0   /* directly or through the buffer, whichever is faster: a send may wait for a receive */
#define EXS_MODE_DIRECT 1    /* always directly */
#define EXS_MODE_INDIRECT 2  /* always through the buffer */
#define EXS_MODE_PUBLISHED 3 /* through the buffer at once if no receive is announced (MacArthur and Russell, section III) */

#define EXS_DESIGN_ADVERT 0 /* the receiver announces its memory, the sender writes there */
#define EXS_DESIGN_SOURCE 1 /* the sender announces its memory, the receiver reads it */

/* What a connection has done. */
typedef struct exs_stats {
    uint64_t st_direct_sent;               /* transfers straight into the peer's memory */
    uint64_t st_direct_bytes_sent;
    uint64_t st_indirect_sent;             /* transfers through the peer's buffer */
    uint64_t st_indirect_bytes_sent;
    uint64_t st_small_sent;                /* transfers within a control message */
    uint64_t st_small_bytes_sent;
    uint64_t st_direct_received;           /* the same three, of the peer's */
    uint64_t st_direct_bytes_received;
    uint64_t st_indirect_received;
    uint64_t st_indirect_bytes_received;
    uint64_t st_small_received;
    uint64_t st_small_bytes_received;
    uint64_t st_mode_switches;             /* changes between direct and indirect, as sender */
    uint64_t st_adverts_sent;              /* announcements of memory */
    uint64_t st_adverts_received;
    uint64_t st_adverts_dropped;           /* of those received, too late to be used */
    uint64_t st_credit_stalls;             /* times that something waited for a credit */
    uint64_t st_ring_stalls;               /* times that a send waited for room in the peer's buffer */
    uint64_t st_retracts;                  /* requests to get announcements back */
    uint64_t st_acks;                      /* messages that told of room in the buffer */
    uint64_t st_credit_messages;           /* messages that told of nothing but credits */
} exs_stats_t;

/* ---- calls ------------------------------------------------------------------------------------------------------------------- */

int exs_init(exs_version_t version);

exs_qhandle_t exs_qcreate(int depth);
int exs_qdelete(exs_qhandle_t qh);
int exs_qmodify(exs_qhandle_t qh, int attr, const void *value, size_t len);
int exs_qstatus(exs_qhandle_t qh, int attr, void *value, size_t len);
int exs_qdequeue(exs_qhandle_t qh, exs_event_t *events, int n, const struct timeval *timeout);

exs_mhandle_t exs_mregister(void *addr, size_t len, int flags);
int exs_mderegister(exs_mhandle_t mh);
int exs_mmodify(exs_mhandle_t mh, void *addr, size_t len, int flags);

int exs_socket(int domain, int type, int protocol);
int exs_bind(int fd, const struct sockaddr *addr, socklen_t addrlen);
int exs_listen(int fd, int backlog);
int exs_getsockname(int fd, struct sockaddr *addr, socklen_t *addrlen);
int exs_getpeername(int fd, struct sockaddr *addr, socklen_t *addrlen);
int exs_getsockopt(int fd, int level, int name, void *value, socklen_t *len);
int exs_setsockopt(int fd, int level, int name, const void *value, socklen_t len);
int exs_fcntl(int fd, int cmd, ...);

int exs_connect(int fd, const struct sockaddr *addr, socklen_t addrlen, int flags, exs_qhandle_t qh, exs_ahandle_t ah);
int exs_accept(int fd, exs_acceptaddr_t *addr, int flags, exs_qhandle_t qh, exs_ahandle_t ah);
int exs_send(int fd, const void *buf, size_t len, int flags, exs_qhandle_t qh, exs_ahandle_t ah, exs_mhandle_t mh);
int exs_recv(int fd, void *buf, size_t len, int flags, exs_qhandle_t qh, exs_ahandle_t ah, exs_mhandle_t mh);
int exs_sendmsg(int fd, const exs_msghdr_t *msg, int flags, exs_qhandle_t qh, exs_ahandle_t ah);
int exs_recvmsg(int fd, exs_msghdr_t *msg, int flags, exs_qhandle_t qh, exs_ahandle_t ah);
int exs_sendfile(int fd, const exs_xferfile_t *vec, int n, int flags, exs_qhandle_t qh, exs_ahandle_t ah);
int exs_poll(const exs_pollfd_t *fds, int n, int flags, exs_qhandle_t qh, exs_ahandle_t ah);
int exs_shutdown(int fd, int how, int flags, exs_qhandle_t qh, exs_ahandle_t ah);
int exs_close(int fd, int flags, exs_qhandle_t qh, exs_ahandle_t ah);
int exs_cancel(int fd, int flags, exs_ahandle_t ah);
int exs_recycle_recv_buffer(int fd, void *buffer);

/* Of <sys/socket.h>, <sys/epoll.h> and <time.h>. */
struct epoll_event;
struct mmsghdr;
struct timespec;

/* The sockets calls under another name: blocking, no queue, no handles. What is no EXS socket goes to the system. */
int exs_sync_socket(int domain, int type, int protocol);
int exs_sync_bind(int fd, const struct sockaddr *addr, socklen_t addrlen);
int exs_sync_listen(int fd, int backlog);
int exs_sync_accept(int fd, struct sockaddr *addr, socklen_t *addrlen);
int exs_sync_connect(int fd, const struct sockaddr *addr, socklen_t addrlen);
ssize_t exs_sync_send(int fd, const void *buf, size_t len, int flags);
ssize_t exs_sync_recv(int fd, void *buf, size_t len, int flags);
ssize_t exs_sync_sendto(int fd, const void *buf, size_t len, int flags, const struct sockaddr *addr, socklen_t addrlen);
ssize_t exs_sync_recvfrom(int fd, void *buf, size_t len, int flags, struct sockaddr *addr, socklen_t *addrlen);
ssize_t exs_sync_sendmsg(int fd, const struct msghdr *msg, int flags);
ssize_t exs_sync_recvmsg(int fd, struct msghdr *msg, int flags);
ssize_t exs_sync_read(int fd, void *buf, size_t len);
ssize_t exs_sync_write(int fd, const void *buf, size_t len);
ssize_t exs_sync_readv(int fd, const struct iovec *iov, int iovcnt);
ssize_t exs_sync_writev(int fd, const struct iovec *iov, int iovcnt);
ssize_t exs_sync_sendfile(int out_fd, int in_fd, off_t *offset, size_t count);
int exs_sync_shutdown(int fd, int how);
int exs_sync_close(int fd);
int exs_sync_poll(struct pollfd *fds, nfds_t n, int timeout);
int exs_sync_select(int n, fd_set *readfds, fd_set *writefds, fd_set *exceptfds, struct timeval *timeout);
int exs_sync_getsockname(int fd, struct sockaddr *addr, socklen_t *addrlen);
int exs_sync_getpeername(int fd, struct sockaddr *addr, socklen_t *addrlen);
int exs_sync_getsockopt(int fd, int level, int name, void *value, socklen_t *len);
int exs_sync_setsockopt(int fd, int level, int name, const void *value, socklen_t len);
int exs_sync_fcntl(int fd, int cmd, ...);

int exs_sync_accept4(int fd, struct sockaddr *addr, socklen_t *addrlen, int flags);
int exs_sync_sendmmsg(int fd, struct mmsghdr *vec, unsigned int n, int flags);
int exs_sync_recvmmsg(int fd, struct mmsghdr *vec, unsigned int n, int flags, struct timespec *timeout);
int exs_sync_socketpair(int domain, int type, int protocol, int fds[2]);
int exs_sync_dup(int fd);
int exs_sync_dup2(int fd, int newfd);
int exs_sync_dup3(int fd, int newfd, int flags);
int exs_sync_ioctl(int fd, unsigned long request, ...);
int exs_sync_sockatmark(int fd);
int exs_sync_ppoll(struct pollfd *fds, nfds_t n, const struct timespec *timeout, const sigset_t *mask);
int exs_sync_pselect(int n, fd_set *readfds, fd_set *writefds, fd_set *exceptfds, const struct timespec *timeout, const sigset_t *mask);
int exs_sync_epoll_create(int size);
int exs_sync_epoll_create1(int flags);
int exs_sync_epoll_ctl(int epfd, int op, int fd, struct epoll_event *event);
int exs_sync_epoll_wait(int epfd, struct epoll_event *events, int n, int timeout);
int exs_sync_epoll_pwait(int epfd, struct epoll_event *events, int n, int timeout, const sigset_t *mask);
int exs_sync_epoll_pwait2(int epfd, struct epoll_event *events, int n, const struct timespec *timeout, const sigset_t *mask);
/*
 * The calls of sockets that are not here keep their names. getaddrinfo, inet_pton and their like use no descriptor. eventfd, timerfd_create, signalfd
 * and pipe make descriptors of the system, which the calls above take. There are none for splice, tee and vmsplice, which move bytes within the kernel;
 * for fdopen, whose stream would read by the system's calls; for io_uring, whose calls do not pass through a library.
 */

/* The same with registered memory. */
ssize_t exs_sync_send_mh(int fd, const void *buf, size_t len, int flags, exs_mhandle_t mh);
ssize_t exs_sync_recv_mh(int fd, void *buf, size_t len, int flags, exs_mhandle_t mh);
ssize_t exs_sync_read_mh(int fd, void *buf, size_t len, exs_mhandle_t mh);
ssize_t exs_sync_write_mh(int fd, const void *buf, size_t len, exs_mhandle_t mh);
ssize_t exs_sync_readv_mh(int fd, const exs_iovec_t *iov, int iovcnt);
ssize_t exs_sync_writev_mh(int fd, const exs_iovec_t *iov, int iovcnt);
ssize_t exs_sync_sendmsg_mh(int fd, const exs_msghdr_t *msg, int flags);
ssize_t exs_sync_recvmsg_mh(int fd, exs_msghdr_t *msg, int flags);

#ifdef __cplusplus
}
#endif

#endif
