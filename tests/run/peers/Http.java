import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.Arrays;
import java.util.Random;
import java.util.concurrent.Executors;

/** An HTTP server and a client that checks each answer; both catch NullPointerException in a loop meanwhile, which is a SIGSEGV in compiled code. */
public class Http {
    static final class Box {
        int value;
    }

    static int look(Box box) {
        return box.value;
    }

    /** Returns how many null pointers were caught. */
    static int nulls(int rounds) {
        Box box = new Box();
        int caught = 0;
        for (int n = 0; n < rounds; n++) {
            try {
                look(n % 2 == 0 ? null : box);
            } catch (NullPointerException e) {
                caught++;
            }
        }
        return caught;
    }

    static void server(int port) throws Exception {
        HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", port), 50);
        server.createContext("/", exchange -> {
            byte[] body = exchange.getRequestBody().readAllBytes();
            nulls(200);
            exchange.sendResponseHeaders(200, body.length == 0 ? -1 : body.length);
            exchange.getResponseBody().write(body);
            exchange.close();
        });
        server.setExecutor(Executors.newFixedThreadPool(4));
        server.start();
    }

    static void client(int port) throws Exception {
        int[] caught = {0};
        Thread thread = new Thread(() -> caught[0] = nulls(600_000));
        thread.start();
        HttpClient client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
        Random random = new Random(1);
        for (int n = 0; n < 200; n++) {
            byte[] body = new byte[1 + (n % 40 == 0 ? 500_000 : random.nextInt(4000))];
            random.nextBytes(body);
            HttpRequest request = HttpRequest.newBuilder(URI.create("http://127.0.0.1:" + port + "/" + n))
                .POST(HttpRequest.BodyPublishers.ofByteArray(body)).build();
            HttpResponse<byte[]> answer = client.send(request, HttpResponse.BodyHandlers.ofByteArray());
            if (answer.statusCode() != 200 || !Arrays.equals(answer.body(), body)) {
                throw new IllegalStateException("answer " + n + " differs");
            }
        }
        thread.join();
        System.out.println("java: 200 answers, " + caught[0] + " null pointers");
        System.exit(0);
    }

    public static void main(String[] args) throws Exception {
        int port = Integer.parseInt(args[1]);
        if (args[0].equals("server")) {
            server(port);
        } else {
            client(port);
        }
    }
}
