/*
 * "Hello iWARP" (fig. 3.17 of the thesis) with libiw, as initiator and as responder.
 *
 *     hello_iwarp serve         listens on 127.0.0.1, prints `port N`, and serves one initiator
 *     hello_iwarp connect PORT
 *
 *     cc -o hello_iwarp hello_iwarp.c $(pkg-config --cflags --libs iw)
 */
#include <iw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char hello[] = "Hello iWARP!";

static void must(int ok, const char *what) {
    if (!ok) {
        fprintf(stderr, "%s: %s\n", what, iw_error());
        exit(1);
    }
}

static int responder(void) {
    iw_listener_t *listener;
    iw_ctx_t *ctx;
    iw_lmr_t data, ctrl;
    iw_wc_t wc;
    must(iw_open("127.0.0.1", 0, &listener) == 0, "iw_open");
    printf("port %d\n", iw_port(listener));
    fflush(stdout);
    must(iw_listen(listener, &ctx) == 0, "iw_listen");
    must(iw_lmr_create(4096, IW_REMOTE_WRITE | IW_REMOTE_READ, &data, ctx) == 0, "iw_lmr_create");
    must(iw_lmr_create(1, 0, &ctrl, ctx) == 0, "iw_lmr_create");
    /* The initiator's two Sends need receives before it can know that it is connected. */
    must(post_recv_lmr(&ctrl, 0, 1, ctx) >= 0 && post_recv_lmr(&ctrl, 0, 1, ctx) >= 0, "post_recv_lmr");
    must(iw_accept(ctx) == 0, "iw_accept");
    /* With iWARP the initiator speaks first. */
    must(await_completions(IW_RCQ, 1, &wc, ctx) == 0, "the first Send");
    must(iw_post_send_adv(&data, ctx) >= 0, "iw_post_send_adv");
    /* Write and Read are one-sided; only the last Send tells that they are over. */
    must(await_completions(IW_RCQ, 1, &wc, ctx) == 0, "the last Send");
    printf("the buffer holds \"%s\"\n", (char *)data.addr);
    must(iw_lmr_deregister(&data) == 0, "iw_lmr_deregister");
    must(iw_disconnect(ctx) == 0, "iw_disconnect");
    must(iw_lmr_deregister(&ctrl) == 0, "iw_lmr_deregister");
    return iw_close(listener);
}

static int initiator(int port) {
    iw_ctx_t *ctx;
    iw_lmr_t src, dst;
    iw_rmr_t remote;
    iw_wc_t wc;
    char buffer[sizeof hello];
    memcpy(buffer, hello, sizeof hello);
    must(iw_ctx_alloc("127.0.0.1", (uint16_t)port, &ctx) == 0, "iw_ctx_alloc");
    must(iw_post_recv_adv(ctx) == 0, "iw_post_recv_adv");
    must(iw_connect(ctx) == 0, "iw_connect");
    must(iw_lmr_register(buffer, sizeof buffer, IW_LOCAL_WRITE, &src, ctx) == 0, "iw_lmr_register");
    must(iw_lmr_create(sizeof hello, IW_LOCAL_WRITE, &dst, ctx) == 0, "iw_lmr_create");
    must(post_send_lmr(&src, 0, 1, 0, ctx) >= 0, "post_send_lmr");
    must(iw_wait_recv_adv(&remote, ctx) == 0, "iw_wait_recv_adv");
    /* The Read does not overtake the Write: only the Read has to be waited for. */
    must(post_write_lmr(&src, 0, &remote, 0, sizeof hello, 0, ctx) >= 0, "post_write_lmr");
    must(post_read_lmr(&dst, 0, &remote, 0, sizeof hello, IW_SIGNALED, ctx) >= 0, "post_read_lmr");
    must(await_completions(IW_SCQ, 1, &wc, ctx) == 0, "the Read");
    if (memcmp(dst.addr, hello, sizeof hello) != 0) {
        fprintf(stderr, "read back something else\n");
        return 1;
    }
    printf("read back \"%s\"\n", (char *)dst.addr);
    must(post_send_lmr(&src, 0, 1, IW_SIGNALED, ctx) >= 0, "post_send_lmr");
    must(await_completions(IW_SCQ, 1, &wc, ctx) == 0, "the last Send");
    must(iw_await_disconnect(ctx) == 0, "iw_await_disconnect");
    must(iw_lmr_deregister(&src) == 0 && iw_lmr_deregister(&dst) == 0, "iw_lmr_deregister");
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "serve") == 0)
        return responder();
    if (argc == 3 && strcmp(argv[1], "connect") == 0)
        return initiator(atoi(argv[2]));
    fprintf(stderr, "usage: hello_iwarp serve | connect PORT\n");
    return 2;
}
